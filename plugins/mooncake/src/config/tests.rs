use super::*;

fn parse(json: &str) -> Result<Config> {
    with(json, &[])
}

fn with(json: &str, variables: &[(&str, &str)]) -> Result<Config> {
    let given: Map<String, Value> = serde_json::from_str(json).unwrap();
    let variable = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    Config::parse("mooncake", &sources::complete("mooncake", given, &variable)?)
}

#[test]
fn a_master_is_enough() {
    let config = parse(r#"{"master_server_address":"10.0.0.1:50051"}"#).unwrap();
    assert_eq!((config.metadata.as_str(), config.host.as_str(), config.port), ("P2PHANDSHAKE", "localhost", 0));
    assert_eq!((config.segment, config.tenant.as_str(), config.metrics_port), (4 << 30, "default", 9003));
}

#[test]
fn sizes_are_those_of_other_clients_too() {
    for (text, bytes) in [
        ("1024", 1024),
        ("\"4gb\"", 4 << 30),
        ("\"4GB\"", 4 << 30),
        ("\"4 GiB\"", 4 << 30),
        ("\"64MiB\"", 64 << 20),
        ("\"5000000\"", 5_000_000),
        ("\"2MB\"", 2_000_000),
    ] {
        let json = format!(r#"{{"master_server_address":"m:1","global_segment_size":{text}}}"#);
        assert_eq!(parse(&json).unwrap().segment, bytes, "{text}");
    }
}

#[test]
fn bad_values_are_errors_that_name_the_key_and_what_would_be_right() {
    for (json, key, word) in [
        (r#"{}"#, "master_server_address", "MOONCAKE_MASTER"),
        (r#"{"master_server_address":"m"}"#, "master_server_address", "10.0.0.1:50051"),
        (r#"{"master_server_address":"m:1","protocol":"cxl"}"#, "protocol", "\"rdma\""),
        (r#"{"master_server_address":"etcd://e"}"#, "master_server_address", "etcd://host:2379"),
        (r#"{"master_server_address":"redis://e:6379"}"#, "master_server_address", "through etcd alone"),
        (r#"{"master_server_address":"m:1","cluster_id":"/"}"#, "cluster_id", "mooncake_cluster"),
        (r#"{"master_server_address":"m:1","metadata_server":"etcd://e"}"#, "metadata_server", "P2PHANDSHAKE"),
        (r#"{"master_server_address":"m:1","metadata_server":7}"#, "metadata_server", "URL"),
        (r#"{"master_server_address":"m:1","global_segment_size":"4 apples"}"#, "global_segment_size", "4GiB"),
        (r#"{"master_server_address":"m:1","local_hostname":"a:b"}"#, "local_hostname", "host:port"),
        (
            r#"{"master_server_address":"m:1","client_server_address":"c:1"}"#,
            "client_server_address",
            "separate client",
        ),
        (r#"{"master_server_address":"m:1","enable_ssd_offload":true}"#, "enable_ssd_offload", "disk"),
        (r#"{"master_server_address":"m:1","extra_backend_tag":"a*"}"#, "extra_backend_tag", "letters"),
        (r#"{"master_server_address":"m:1","replica_num":0}"#, "replica_num", "1 to 16"),
        (r#"{"master_server_address":"m:1","soft_pin_ttl":5}"#, "soft_pin_ttl", "soft_pin = true"),
        (r#"{"master_server_address":"m:1","nonsense":5}"#, "nonsense", "no such key"),
    ] {
        let error = parse(json).unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidConfig);
        assert!(error.message.starts_with(&format!("storage.mooncake.{key}: ")), "{error}");
        assert!(error.message.contains(word), "{word}: {error}");
    }
}

#[test]
fn environment_and_file_complete_what_names_no_master() {
    let env = [("MOONCAKE_MASTER", "e:1"), ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "2gb"), ("MOONCAKE_CHECK_SERVER", "true")];
    let config = with("{}", &env).unwrap();
    assert_eq!((config.master.as_str(), config.segment, config.check_server), ("e:1", 2 << 30, true));
    let config = with(r#"{"global_segment_size":0}"#, &env).unwrap();
    assert_eq!((config.master.as_str(), config.segment), ("e:1", 0), "what the configuration says counts");
    let config = with(r#"{"master_server_address":"m:1"}"#, &env).unwrap();
    assert_eq!((config.master.as_str(), config.segment), ("m:1", 4 << 30), "sources are not merged");
    let config = with(r#"{"master_server_address":"m:1","local_hostname":"a"}"#, &[("MOONCAKE_LOCAL_HOSTNAME", "b:7")]);
    let config = config.unwrap();
    assert_eq!((config.host.as_str(), config.port), ("b", 7), "the machine's own name counts first");
    let rdma = with(r#"{"master_server_address":"m:1"}"#, &[("MOONCAKE_PROTOCOL", "rdma")]).unwrap();
    assert!(rdma.rdma.is_some());

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mooncake.json");
    std::fs::write(&path, r#"{"master_server_address":"f:1","tenant_id":" ","unknown":1,"device_name":null}"#).unwrap();
    let file = [("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", path.to_str().unwrap()), ("MOONCAKE_MASTER", "e:1")];
    let config = with("{}", &file).unwrap();
    assert_eq!((config.master.as_str(), config.tenant.as_str()), ("f:1", "default"));
    std::fs::write(&path, "{}").unwrap();
    assert!(with("{}", &file).unwrap_err().message.contains("it has no master_server_address"));
    std::fs::write(&path, "no").unwrap();
    assert!(with("{}", &file).unwrap_err().message.contains("no JSON object"));
}

#[test]
fn hosts_may_have_a_port() {
    for (text, host_is, port) in [
        ("a", "a", 0),
        ("a:7", "a", 7),
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("[::1]:9", "::1", 9),
        ("::1", "::1", 0),
        ("[::1]", "::1", 0),
    ] {
        assert_eq!(host(text), Some((host_is.to_owned(), port)), "{text}");
    }
    assert_eq!(host(""), None);
}

#[test]
fn the_schema_takes_the_check_config_and_knows_every_key() {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let check: Value = serde_json::from_str(&CHECK_CONFIG.replace("{scratch}", "/tmp/.tmpA-1")).unwrap();
    assert!(jsonschema::validator_for(&schema).unwrap().is_valid(&check));
    assert!(Config::parse("mooncake", check.as_object().unwrap()).is_ok());
    for key in schema["properties"].as_object().unwrap().keys() {
        let json = format!(r#"{{"master_server_address":"m:1","{key}":{{}}}}"#);
        let error = parse(&json).unwrap_err();
        assert!(!error.message.contains("no such key"), "{error}");
    }
}
