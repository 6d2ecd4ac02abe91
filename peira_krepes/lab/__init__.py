"""The laboratory: data, views, encoders, training, probes, runs and figures. Everything an experiment needs; imported by no other room."""
