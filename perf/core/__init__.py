"""Code that the measurements of all systems share; it imports no system."""
