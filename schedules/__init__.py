"""Schedules: transforms of losses, gradient functions and optimizers, written on the public API. None is here yet."""
