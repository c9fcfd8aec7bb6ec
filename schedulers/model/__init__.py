"""What a schedule takes: machines, simulation, bounds, selection."""
