"""Rollout actors: engine, environments, rewards and the rollout loop."""
