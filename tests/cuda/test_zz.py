import pytest, launches, mlx.core as mx, metal_backward
from nvrtc import compiled
from gradient_oracle import draw_call
import numpy as np
