use serde_json::{Map, json};

use super::*;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new("test", source, "<s>", "</s>").unwrap()
}

fn render(source: &str) -> Result<String, ModelError> {
    template(source).render(&json!([{"role": "user", "content": " hi "}]), true, &Map::new())
}

#[test]
fn standard_variables_are_there_and_cannot_be_hidden() {
    let mut variables = Map::new();
    variables.insert("bos_token".into(), json!("evil"));
    variables.insert("enable_thinking".into(), json!(false));
    let text = template(
        "{{ bos_token }}{{ messages[0].role }}{{ eos_token }}{{ add_generation_prompt }}{{ enable_thinking }}",
    )
    .render(&json!([{"role": "user", "content": "x"}]), false, &variables)
    .unwrap();
    assert_eq!(text, "<s>user</s>FalseFalse");
}

#[test]
fn block_lines_leave_no_white_space() {
    let source = "{% for m in messages %}\n    {% if true %}\n{{ m['content'] }}\n    {% endif %}\n{% endfor %}\n";
    assert_eq!(render(source).unwrap(), " hi \n");
}

#[test]
fn string_methods_of_python() {
    let source = "{{ messages[0].content.strip() }}|{{ 'a,b'.split(',')[-1] }}|{{ 'abc'.startswith('ab') }}|\
        {{ 'abc'.removeprefix('a') }}|{{ 'x\n'.rstrip() }}|{{ 'Ab'.upper() }}|{{ {'k': 1}.get('z') }}|{% for k, v in {'q': 2}.items() %}{{ k }}{{ v }}{% endfor %}";
    assert_eq!(render(source).unwrap(), "hi|b|True|bc|x|AB|None|q2");
}

#[test]
fn to_json_is_pythons() {
    let source = r#"{{ {"b": [1, 2.0, none, true], "a": "é<&'\"\n"} | tojson }}"#;
    assert_eq!(render(source).unwrap(), r#"{"b": [1, 2.0, null, true], "a": "é<&'\"\n"}"#);
    assert_eq!(
        render("{{ {'a': [1], 'b': {}} | tojson(indent=2) }}").unwrap(),
        "{\n  \"a\": [\n    1\n  ],\n  \"b\": {}\n}"
    );
}

#[test]
fn objects_keep_the_order_of_the_request() {
    let text = template("{{ messages[0].x | tojson }}")
        .render(&json!([{"x": {"z": 1, "a": 2, "m": 1e-5}}]), false, &Map::new())
        .unwrap();
    assert_eq!(text, r#"{"z": 1, "a": 2, "m": 1e-05}"#);
}

#[test]
fn values_print_as_in_python() {
    assert_eq!(
        render(r#"{{ [1, 'a', "it's", none, {'k': 1.5}] }}{{ missing }}{{ 1e20 }}"#).unwrap(),
        r#"[1, 'a', "it's", None, {'k': 1.5}]1e+20"#
    );
}

#[test]
fn loop_controls_and_generation_marks() {
    let source = "{% for x in [1,2,3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}\
        {%- generation -%} a {%- endgeneration -%}";
    assert_eq!(render(source).unwrap(), "13a");
}

#[test]
fn the_templates_own_refusal_is_the_message() {
    let error = render("\n{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert_eq!(error.to_string(), "chat template \"test\": roles must alternate (line 2)");
}

#[test]
fn a_broken_template_is_an_error_that_names_it() {
    let error = ChatTemplate::new("tokenizer.chat_template", "{% for %}", "", "").unwrap_err();
    assert!(error.to_string().starts_with("chat template \"tokenizer.chat_template\":"), "{error}");
    assert!(error.to_string().contains("line 1"), "{error}");
}

#[test]
fn a_template_without_end_is_stopped() {
    let source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}";
    let error = render(source).unwrap_err();
    assert!(error.to_string().contains("does not come to an end"), "{error}");
}

#[test]
fn the_date_is_written_by_the_format() {
    let text = render("{{ strftime_now('%Y-%m-%d') }}").unwrap();
    assert_eq!(text.len(), 10, "{text}");
    assert!(render("{{ strftime_now('%~') }}").is_err());
}
