"""Several replicas of the whole server behind one address: who is asked, and one answer out of many.

Nothing here knows what runs the replicas; `akv_jax/ray_app.py` does it with Ray Serve. docs/replicas.md.
"""
