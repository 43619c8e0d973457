"""Remember bad machines across jobs: strikes, quarantine, circuit breaker."""
