"""Virtual time fitted to what a run left, and what another run would come to."""
