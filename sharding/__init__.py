"""Where arrays live and what travels between devices. This package knows no training and no file."""
