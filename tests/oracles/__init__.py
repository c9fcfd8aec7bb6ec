"""Float64 references and error bounds; never imported at run time."""
