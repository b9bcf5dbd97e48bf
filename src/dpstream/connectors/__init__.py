"""Where rows come from and where releases go."""
