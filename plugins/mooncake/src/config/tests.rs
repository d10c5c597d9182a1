use super::sources::Note;
use super::*;

fn parse(json: &str) -> Result<Config> {
    with(json, &[])
}

fn with(json: &str, variables: &[(&str, &str)]) -> Result<Config> {
    let given: Map<String, Value> = serde_json::from_str(json).unwrap();
    let variable = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let sources::Complete { map, origins, notes } = sources::complete("mooncake", given, &variable)?;
    let config = Config::parse("mooncake", &map).map_err(|error| sources::traced("mooncake", error, &origins))?;
    Ok(Config { notes, ..config })
}

fn fits_schema(json: &str) -> bool {
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    jsonschema::validator_for(&schema).unwrap().is_valid(&serde_json::from_str(json).unwrap())
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

/// `kvdock config check` looks at a file without the environment: what it lets pass has to be what the start lets pass.
#[test]
fn the_check_of_a_configuration_passed_what_the_start_refused() {
    let with = |key: &str, value: &str| format!(r#"{{"master_server_address":"m:1","{key}":{value}}}"#);
    let master = |text: &str| format!(r#"{{"master_server_address":"{text}"}}"#);
    let bad = [
        "m",
        "m:",
        ":1",
        "m:0x",
        "m:65536",
        "m:1/x",
        "etcd://",
        "etcd://e",
        "etcd://a:1;b",
        "etcd://http://a:1",
        "redis://e:6379",
        "m m:1",
        "a:b:1",
    ];
    let good = [
        "m:1",
        "10.0.0.1:50051",
        "m:65535",
        "m-1.x:00080",
        "[::1]:9",
        "etcd://a:1",
        "etcd://a:1;b:2",
        "etcd://a:1, b:2,",
        "etcd://[::1]:2379",
    ];
    let mut cases: Vec<(String, bool)> = bad.iter().map(|text| (master(text), false)).collect();
    cases.extend(good.iter().map(|text| (master(text), true)));
    for (key, value, is_good) in [
        ("protocol", r#""cxl""#, false),
        ("protocol", r#""rdma""#, true),
        ("cluster_id", r#""/""#, false),
        ("cluster_id", r#""a/""#, true),
        ("metadata_server", r#""etcd://e""#, false),
        ("metadata_server", r#""https://h/metadata""#, false),
        ("metadata_server", r#""http://h/x?key=1""#, false),
        ("metadata_server", r#""http://a b/""#, false),
        ("metadata_server", r#""http://10.0.0.1:8080/metadata""#, true),
        ("metadata_server", r#""p2pHandshake""#, true),
        ("metadata_server", "7", false),
        ("local_hostname", r#""a:b""#, false),
        ("local_hostname", r#""a:70000""#, false),
        ("local_hostname", r#""""#, false),
        ("local_hostname", r#""a""#, true),
        ("local_hostname", r#""a:0""#, true),
        ("local_hostname", r#""a:17000""#, true),
        ("local_hostname", r#""::1""#, true),
        ("local_hostname", r#""[::1]:9""#, true),
        ("global_segment_size", r#""4 apples""#, false),
        ("global_segment_size", r#""99999999TiB""#, false),
        ("global_segment_size", r#""9999999TiB""#, true),
        ("global_segment_size", r#""4gb""#, true),
        ("global_segment_size", "-1", false),
        ("extra_backend_tag", r#""a*""#, false),
        ("extra_backend_tag", r#""a/b_c.d-e""#, true),
        ("replica_num", "0", false),
        ("replica_num", "17", false),
        ("soft_pin_ttl", "5", false),
        ("standalone_storage", "true", false),
        ("standalone_storage", "false", true),
        ("client_server_address", r#""c:1""#, false),
        ("client_server_address", r#""""#, true),
        ("enable_ssd_offload", "true", false),
        ("preferred_segments", "[1]", false),
        ("master_metrics_port", "0", false),
        ("nonsense", "5", false),
    ] {
        cases.push((with(key, value), is_good));
    }
    cases.push((r#"{"master_server_address":"m:1","soft_pin":false,"soft_pin_ttl":5}"#.to_owned(), false));
    cases.push((r#"{"master_server_address":"m:1","soft_pin":true,"soft_pin_ttl":5}"#.to_owned(), true));
    for (json, is_good) in cases {
        assert_eq!(parse(&json).is_ok(), is_good, "the start: {json}");
        assert_eq!(fits_schema(&json), is_good, "the check: {json}");
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
    let said: Vec<&Note> = config.notes.iter().filter(|note| note.warns).collect();
    assert!(said[0].text.contains("MOONCAKE_LOCAL_HOSTNAME") && said[0].text.contains("\"a\" does not"), "{said:?}");
    let same = with(r#"{"master_server_address":"m:1","local_hostname":"a"}"#, &[("LOCAL_HOSTNAME", "a")]).unwrap();
    assert!(same.notes.iter().all(|note| !note.warns), "{:?}", same.notes);
    let wrong = with(r#"{"master_server_address":"m:1","local_hostname":"a"}"#, &[("LOCAL_HOSTNAME", "b:x")]);
    let wrong = wrong.unwrap_err().message;
    assert!(wrong.contains("local_hostname") && wrong.contains("the variable LOCAL_HOSTNAME"), "{wrong}");
    let wrong = with("{}", &[("MOONCAKE_MASTER", "nowhere")]).unwrap_err().message;
    assert!(wrong.contains("the variable MOONCAKE_MASTER"), "{wrong}");
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
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    assert!(with("{}", &file).unwrap_err().message.contains("at most 1048576 bytes"), "it was read into memory");
    let device = [("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", "/dev/zero")];
    assert!(with("{}", &device).unwrap_err().message.contains("expected a regular file"), "it was read without end");
}

/// On three machines, with the name left out, each server told the others to find it at their own.
#[test]
fn a_name_that_no_other_machine_reaches_was_given_out_without_a_word() {
    let warned = |json: &str| {
        let config = parse(json).unwrap();
        config.unreachable().is_some_and(|note| note.warns && note.text.contains("local_hostname"))
    };
    assert!(warned(r#"{"master_server_address":"10.0.0.1:50051"}"#));
    assert!(warned(
        r#"{"master_server_address":"etcd://127.0.0.1:2379;10.0.0.2:2379","local_hostname":"127.0.0.1:17000"}"#
    ));
    for json in [
        r#"{"master_server_address":"10.0.0.1:50051","local_hostname":"10.0.0.2"}"#,
        r#"{"master_server_address":"10.0.0.1:50051","global_segment_size":0}"#,
        r#"{"master_server_address":"localhost:50051"}"#,
        r#"{"master_server_address":"[::1]:50051"}"#,
        r#"{"master_server_address":"etcd://127.0.0.1:2379;localhost:2380"}"#,
    ] {
        assert!(!warned(json), "{json}");
    }
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

#[test]
fn a_fixed_port_grows_with_the_rank() {
    let of = |first, tp: (u32, u32), pp: (u32, u32)| {
        port_of_rank("mooncake", first, &Identity { tp, pp, ..kvdock_plugin_api::mock::identity("model") })
    };
    assert_eq!(of(7000, (0, 1), (0, 1)).unwrap(), 7000);
    assert_eq!(of(7000, (1, 2), (1, 2)).unwrap(), 7003);
    assert_eq!(of(0, (1, 2), (0, 1)).unwrap(), 0);
    let context = Identity { cp: (1, 2), tp: (0, 2), ..kvdock_plugin_api::mock::identity("model") };
    assert_eq!(port_of_rank("mooncake", 7000, &context).unwrap(), 7002);
    let error = of(65535, (1, 2), (0, 1)).unwrap_err();
    assert!(error.message.contains("storage.mooncake.local_hostname") && error.message.contains("rank 1"), "{error}");
}
