"""The island's sending and fetching, on threads that its train loop never waits for."""
