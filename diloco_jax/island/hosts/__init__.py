"""How several host processes are one island."""
