"""Operations among a set of ranks."""
