"""The Triton backend of rowwise."""
