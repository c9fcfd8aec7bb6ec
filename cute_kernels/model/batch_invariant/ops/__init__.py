"""What stands in for aten's ops."""
