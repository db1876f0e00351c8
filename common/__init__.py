"""What every room may use: files, and text for a terminal. It imports no other room."""
