"""Keys and values: layout, pools, writes, the views that models see, and a forward's arrays."""
