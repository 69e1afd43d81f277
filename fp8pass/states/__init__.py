"""Own scales and amaxes: who has which, when a step rolls them, how ranks agree, how they are saved."""
