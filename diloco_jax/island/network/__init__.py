"""What an island sends and fetches, on threads that its train loop never waits for."""
