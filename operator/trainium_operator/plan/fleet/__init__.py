"""The memory of bad machines across jobs: strikes, quarantine, circuit breaker."""
