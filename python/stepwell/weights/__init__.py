"""How weights come to a module, where they are on the device only while modules use them."""
