"""Benchmarks, experiments and the crash model. This package may import all of lastgood, which never imports it."""
