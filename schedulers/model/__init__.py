"""Model of a schedule's time: machines, simulation, bounds, selection."""
