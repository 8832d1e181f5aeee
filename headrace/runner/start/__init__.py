"""What a start measures, proves and keeps."""
