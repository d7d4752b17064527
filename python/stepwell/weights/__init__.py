"""How weights and activations come to the device that are there only while they are used."""
