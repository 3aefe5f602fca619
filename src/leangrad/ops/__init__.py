"""Forward/backward pairs with explicit buffers (`out=`, `into=`): plain functions that know nothing of autograd."""
