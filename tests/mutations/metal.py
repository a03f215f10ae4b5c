"""What is promised of the Metal kernels, broken."""

from mutation import Mutation

MUTATIONS: list[Mutation] = []
