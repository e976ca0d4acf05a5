"""What is known of machines: slices, chips, machine types, measured rates."""
