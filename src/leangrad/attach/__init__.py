"""How `lean` holds on to a module: by a training step that is no forward, and by a warning where neither is called."""
