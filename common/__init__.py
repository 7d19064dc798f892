"""Records, configuration and wire formats shared by every Slipstream service."""
