"""Other libraries' ways to call this one: each module imports its library at first use only."""
