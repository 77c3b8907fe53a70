"""The worker's room: everything that touches the model and the device."""
