//! Configuration: one TOML file, `--set`, environment.
