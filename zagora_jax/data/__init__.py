"""From data files to batches: rows, chat rendering with loss masks, packing, batches."""
