"""The parts of persistent.cu, and test equipment: emulator.py and emulator.h run persistent.cu on a CPU."""
