"""From a name to loaded weights: where a model comes from, what it says about itself, how it is loaded."""
