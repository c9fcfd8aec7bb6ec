"""Order of the tiles: rasters and tickets, host and device halves."""
