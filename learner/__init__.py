"""The learner: estimators, objectives, value learning, updates and the publication of weights."""
