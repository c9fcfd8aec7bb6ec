"""What every system's measurements share; imports no system."""
