"""Everything else that can be swapped: pickers, stops, observers, attention, profiles, commands."""
