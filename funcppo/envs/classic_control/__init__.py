"""Classic control problems, with the equations and constants of Gymnasium."""
