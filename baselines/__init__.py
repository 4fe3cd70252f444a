"""What Thermocline is compared with, built from the same parts: same data, models, optimizers and C++ kernels."""
