"""Systems that Thermocline is compared with, built from its data readers, models, optimizers and C++ kernels."""
