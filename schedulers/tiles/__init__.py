"""Which tile is next: rasters and tickets, host and device halves."""
