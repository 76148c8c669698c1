"""A small Q-network in plain numpy: forward pass, backward pass, and the Adam optimiser.

All weights of a network live in one flat float32 vector, and the layers are views into it. So
copying a network, averaging two of them, taking an optimiser's step, or sending one to another
process through a replay table is always an operation on one array.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]


class Layer(NamedTuple):
    """Views into the flat vector of parameters: weight [inputs, outputs] and bias [outputs]."""

    weight: FloatArray
    bias: FloatArray


def parameter_count(sizes: tuple[int, ...]) -> int:
    """How many numbers a fully connected network with layers of these widths has."""
    return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(sizes))


def _layers(flat: FloatArray, sizes: tuple[int, ...]) -> list[Layer]:
    """Cuts a flat vector into the layers of a network; the layers share its memory."""
    layers = []
    start = 0
    for inputs, outputs in itertools.pairwise(sizes):
        middle = start + inputs * outputs
        end = middle + outputs
        layers.append(Layer(flat[start:middle].reshape(inputs, outputs), flat[middle:end]))
        start = end
    return layers


def _linear(inputs: FloatArray, layer: Layer) -> FloatArray:
    outputs: FloatArray = inputs @ layer.weight + layer.bias
    return outputs


def _relu(inputs: FloatArray) -> FloatArray:
    outputs: FloatArray = np.maximum(inputs, np.float32(0.0))
    return outputs


class QNetwork:
    """Action values of a state: fully connected layers with ReLU in between.

    Args:
        sizes: width of each layer, from the observation's length to the number of actions.
        input_scale: what each observation is multiplied by, float32[sizes[0]].
        parameters: flat float32 vector to copy the weights from; None means zeros.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        input_scale: FloatArray,
        parameters: FloatArray | None = None,
    ) -> None:
        self.sizes = sizes
        self.input_scale = input_scale
        self.parameters: FloatArray = np.zeros(parameter_count(sizes), np.float32)
        if parameters is not None:
            self.parameters[:] = parameters
        self._layers = _layers(self.parameters, sizes)
        self.gradient: FloatArray = np.zeros_like(self.parameters)
        self._gradient_layers = _layers(self.gradient, sizes)

    def initialise(self, rng: np.random.Generator) -> None:
        """Draws the weights from He's normal distribution and sets the biases to zero."""
        for layer in self._layers:
            inputs = layer.weight.shape[0]
            layer.weight[:] = rng.normal(0.0, np.sqrt(2.0 / inputs), layer.weight.shape)
            layer.bias[:] = 0.0

    def values(self, observations: FloatArray) -> FloatArray:
        """Action values float32[..., actions] of observations float32[..., sizes[0]]."""
        activation = observations * self.input_scale
        for layer in self._layers[:-1]:
            activation = _relu(_linear(activation, layer))
        return _linear(activation, self._layers[-1])

    def backward(
        self, observations: FloatArray, actions: IntArray, targets: FloatArray, weights: FloatArray
    ) -> FloatArray:
        """Leaves the gradient of the loss in `self.gradient` and returns the errors.

        The loss is the mean over the batch of weight * huber(error), where
        error = Q(observation, action) - target, so that one wild target moves the network by a
        bounded amount.

        Args:
            observations: float32[B, sizes[0]].
            actions: int32[B], the actions taken.
            targets: float32[B], what the values of those actions should have been.
            weights: float32[B], importance weights.

        Returns:
            The errors before the step, float32[B].
        """
        inputs = [observations * self.input_scale]
        for layer in self._layers[:-1]:
            inputs.append(_relu(_linear(inputs[-1], layer)))
        values = _linear(inputs[-1], self._layers[-1])

        rows = np.arange(len(actions))
        errors: FloatArray = values[rows, actions] - targets
        delta: FloatArray = np.zeros_like(values)
        delta[rows, actions] = weights * np.clip(errors, -1.0, 1.0) / len(actions)

        for index in reversed(range(len(self._layers))):
            gradient = self._gradient_layers[index]
            np.matmul(inputs[index].T, delta, out=gradient.weight)
            np.sum(delta, axis=0, out=gradient.bias)
            if index > 0:  # the derivative of ReLU is 1 where its output is positive, else 0
                delta = (delta @ self._layers[index].weight.T) * (inputs[index] > 0.0)
        return errors


class Adam:
    """Adam (Kingma & Ba, 2015) on one flat vector, with the gradient's norm clipped."""

    def __init__(self, size: int, max_norm: float) -> None:
        self._mean: FloatArray = np.zeros(size, np.float32)
        self._square: FloatArray = np.zeros(size, np.float32)
        self._steps = 0
        self._max_norm = max_norm

    def step(self, parameters: FloatArray, gradient: FloatArray, learning_rate: float) -> None:
        """Moves `parameters` one step down the gradient, in place."""
        norm = float(np.sqrt(gradient @ gradient))
        if norm > self._max_norm:
            gradient *= self._max_norm / norm
        self._steps += 1
        self._mean += 0.1 * (gradient - self._mean)
        self._square += 0.001 * (gradient * gradient - self._square)
        mean_scale = 1.0 - 0.9**self._steps
        square_scale = 1.0 - 0.999**self._steps
        step_size = learning_rate / mean_scale
        parameters -= step_size * self._mean / (np.sqrt(self._square / square_scale) + 1e-8)
