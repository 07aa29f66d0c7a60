"""What a person sees and what is written down of a run: progress, metrics, comparison tables."""
