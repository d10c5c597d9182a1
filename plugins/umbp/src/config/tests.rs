use super::*;

fn parse_in(json: &str, environment: &[(&str, &str)]) -> Result<Config> {
    let variable = |name: &str| {
        let found = environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        found.or_else(|| (name == "HOME").then(|| "/home/me".to_owned()))
    };
    Config::parse("umbp", &environment::complete(serde_json::from_str(json).unwrap(), &variable), &variable)
}

fn parse(json: &str) -> Result<Config> {
    parse_in(json, &[])
}

#[test]
fn nothing_is_needed() {
    let config = parse("{}").unwrap();
    assert_eq!((config.dram.capacity, config.dram.page), (4 << 30, 65536));
    let ssd = config.ssd.unwrap();
    assert_eq!(ssd.dirs, [PathBuf::from("/home/me/.cache/kvdock/umbp")]);
    assert!(ssd.strict && ssd.verify && ssd.direct);
}

#[test]
fn the_environment_completes_and_the_configuration_counts() {
    let environment = [
        ("UMBP_DRAM_CAPACITY", "1048576"),
        ("UMBP_SSD_DIR", "/a,/b"),
        ("UMBP_ROLE", "LEADER"),
        ("UMBP_SSD_DURABILITY", "relaxed"),
        ("UMBP_DRAM_HIGH_WM", "0.8"),
    ];
    let config = parse_in(r#"{"ssd_durability_mode":"strict"}"#, &environment).unwrap();
    assert_eq!((config.dram.capacity, config.dram.high, config.role), (1 << 20, 0.8, Role::Leader));
    let ssd = config.ssd.unwrap();
    assert_eq!(ssd.dirs, [PathBuf::from("/a"), PathBuf::from("/b")]);
    assert!(ssd.strict);
}

#[test]
fn a_small_pool_gets_small_pages() {
    assert_eq!(parse(r#"{"dram_capacity_bytes":131072}"#).unwrap().dram.page, 16384);
    assert_eq!(parse(r#"{"dram_capacity_bytes":100000}"#).unwrap().dram.page, 8192);
    assert_eq!(parse(r#"{"dram_capacity_bytes":"8MiB"}"#).unwrap().dram.page, 65536);
}

#[test]
fn h02_a_disk_that_is_not_served_is_no_default() {
    assert!(parse("{}").unwrap().ssd.is_some());
    assert!(parse(r#"{"ssd_enabled":false}"#).unwrap().ssd.is_none());
}

#[test]
fn bad_values_are_errors_that_name_the_key() {
    for (json, key) in [
        (r#"{"dram_capacity_bytes":"much"}"#, "dram_capacity_bytes"),
        (r#"{"dram_page_size":5000}"#, "dram_page_size"),
        (r#"{"dram_high_watermark":1.5}"#, "dram_high_watermark"),
        (r#"{"dram_low_watermark":0.95}"#, "dram_low_watermark"),
        (r#"{"ssd_low_watermark":0.9}"#, "ssd_low_watermark"),
        (r#"{"ssd_storage_dir":""}"#, "ssd_storage_dir"),
        (r#"{"ssd_backend":"spdk"}"#, "ssd_backend"),
        (r#"{"role":"follower","ssd_enabled":false}"#, "role"),
        (r#"{"role":"boss"}"#, "role"),
        (r#"{"standalone_address":"10.0.0.1:5"}"#, "standalone_address"),
        (r#"{"standalone_auto_start":true}"#, "standalone_auto_start"),
        (r#"{"master_address":"10.0.0.1:5"}"#, "master_address"),
        (r#"{"ssd_copy_worker_threads":0}"#, "ssd_copy_worker_threads"),
        (r#"{"extra_backend_tag":"a b"}"#, "extra_backend_tag"),
        (r#"{"drams":1}"#, "drams"),
    ] {
        let error = parse(json).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidConfig);
        assert!(error.message.contains(&format!("storage.umbp.{key}:")), "{json}: {}", error.message);
    }
}

#[test]
fn the_schema_agrees_with_the_reader() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    for (json, good) in [
        (r#"{"dram_capacity_bytes":"4GiB","dram_page_size":65536,"ssd_storage_dir":"/x,/y","role":"leader"}"#, true),
        (r#"{"eviction_policy":"prefix_aware_lru","eviction_candidate_window":4,"auto_promote_on_read":false}"#, true),
        (r#"{"standalone_address":"unix:///tmp/x.grpc.sock","node_id":"a","node_tags":["a=b"]}"#, true),
        (r#"{"ssd_copy_worker_threads":0}"#, false),
        (r#"{"dram_high_watermark":0}"#, false),
        (r#"{"eviction_policy":"random"}"#, false),
        (r#"{"other":1}"#, false),
    ] {
        assert_eq!(parse(json).is_ok(), good, "{json}");
        assert_eq!(validator.is_valid(&serde_json::from_str(json).unwrap()), good, "{json}");
    }
    assert!(validator.is_valid(&serde_json::from_str(CHECK_CONFIG).unwrap()));
}
