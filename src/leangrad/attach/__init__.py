"""How `lean` reaches modules that train through another method than forward: `training_step`, or else a warning."""
