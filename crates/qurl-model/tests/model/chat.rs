//! Chat templates in the styles of published models (written for these tests), and their errors.

use std::fs;

use crate::common::{TempDir, python};
use qurl_model::tokenizer::CharacterSpecials;
use qurl_model::{ChatError, ChatTemplate, Message, Tokenizer};
use serde_json::{Map, Value, json};

/// ChatML with tools and a default system prompt, in the style of Qwen2.5.
const CHATML: &str = r#"
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a test.' }}
    {%- endif %}
    {{- "\n\nSignatures:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are a test.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"#;

/// Headers, a date and trimmed contents, in the style of Llama 3.
const HEADERS: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- arg_name + '="' + arg_val + '"' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- endif %}
        {%- endfor %}
        {%- for key, value in tool_call.arguments.items() %}{{ key }};{% endfor %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"#;

/// Namespaces, nested conditions on one line and a split of the reasoning, in the style of DeepSeek-R1.
const REASONING: &str = concat!(
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}",
    "{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}",
    "{%- for message in messages %}{%- if message['role'] == 'system' %}",
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}",
    "{{bos_token}}{{ns.system_prompt}}",
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}",
    "{{'<|User|>' + message['content']}}{%- endif %}",
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}",
    "{% set content = message['content'] %}",
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif \
     %}",
    "{{'<|Assistant|>'}}{% generation %}{{ content }}{{ eos_token }}{% endgeneration %}{%- endif %}",
    "{%- endfor -%}",
    "{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\\n'}}{% endif %}"
);

fn conversation() -> Vec<Message> {
    vec![
        Message::new("system", "Be brief."),
        Message::new("user", "  What is 2+2?\n"),
        Message::new("assistant", "<think>\neasy\n</think>\n\n4"),
        Message::new("user", "Sure?"),
    ]
}

/// A tokenizer that carries `template` in its settings.
fn tokenizer_with(template: Value) -> Tokenizer {
    let specials = CharacterSpecials {
        pad: "<pad>".to_string(),
        bos: Some("<|begin|>".to_string()),
        eos: "<|end|>".to_string(),
    };
    let plain = Tokenizer::characters("ab", &specials).unwrap();
    let mut files = plain.files().to_vec();
    let mut settings: Value = serde_json::from_slice(&files[1].1).unwrap();
    settings["chat_template"] = template;
    files[1].1 = settings.to_string().into_bytes();
    Tokenizer::from_files(files, "dir").unwrap()
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::of(&tokenizer_with(json!(source))).unwrap().unwrap()
}

#[test]
fn chatml_style() {
    let chat = template(CHATML);
    assert_eq!(
        chat.render(&conversation()[1..2], true).unwrap(),
        "<|im_start|>system\nYou are a test.<|im_end|>\n<|im_start|>user\n  What is \
         2+2?\n<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(
        chat.render(&conversation()[..2], false).unwrap(),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n  What is 2+2?\n<|im_end|>\n"
    );
    let thinking = Map::from_iter([("enable_thinking".to_string(), json!(false))]);
    let text = chat.render_json(&json!([{"role": "user", "content": "Hi"}]), true, &thinking).unwrap();
    assert!(text.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"), "{text}");
}

#[test]
fn chatml_style_with_tools_spaces_json_like_python() {
    let parameters = json!({"zone": 1, "city": ["Zürich", null]});
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": parameters}});
    let arguments = json!({"city": "Zürich <a>", "n": 1.5});
    let function = json!({"name": "weather", "arguments": arguments});
    let call = json!({"role": "assistant", "content": "", "tool_calls": [{"function": function}]});
    let messages = json!([{"role": "user", "content": "Weather?"}, call, {"role": "tool", "content": "sun"}]);
    let variables = Map::from_iter([("tools".to_string(), json!([tool]))]);
    let text = template(CHATML).render_json(&messages, false, &variables).unwrap();
    assert_eq!(
        text,
        concat!(
            "<|im_start|>system\nYou are a test.\n\nSignatures:\n<tools>\n",
            r#"{"type": "function", "function": {"name": "weather", "#,
            r#""parameters": {"zone": 1, "city": ["Zürich", null]}}}"#,
            "\n</tools><|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n",
            "<|im_start|>assistant\n<tool_call>\n",
            r#"{"name": "weather", "arguments": {"city": "Zürich <a>", "n": 1.5}}"#,
            "\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n",
        )
    );
}

#[test]
fn header_style() {
    let chat = template(HEADERS).with_time(1_732_579_200);
    assert_eq!(
        chat.render(&conversation()[..2], true).unwrap(),
        concat!(
            "<|begin|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Nov 2024\n\nBe \
             brief.<|eot_id|>",
            "<|start_header_id|>user<|end_header_id|>\n\nWhat is 2+2?<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )
    );
    let call = |n: usize| {
        let call = json!({"function": {"name": "f", "arguments": {"z": "1", "a": "2"}}});
        json!([{"role": "assistant", "tool_calls": vec![call; n]}])
    };
    let text = chat.render_json(&call(1), false, &Map::new()).unwrap();
    assert!(text.ends_with("\n\nz=\"1\", a=\"2\"z;a;<|eot_id|>"), "{text}");
    let error = chat.render_json(&call(2), false, &Map::new()).unwrap_err();
    assert!(matches!(error, ChatError::Render { .. }));
    let text = error.to_string();
    assert!(text.contains("tokenizer_config.json: the chat template failed at line "), "{text}");
    assert!(text.ends_with("This model only supports single tool-calls at once!"), "{text}");
}

#[test]
fn reasoning_style() {
    assert_eq!(
        template(REASONING).render(&conversation(), true).unwrap(),
        "<|begin|>Be brief.<|User|>  What is 2+2?\n<|Assistant|>4<|end|><|User|>Sure?<|Assistant|><think>\n"
    );
}

#[test]
fn templates_are_found_where_they_are_kept() {
    let default =
        json!([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]);
    let found = ChatTemplate::of(&tokenizer_with(default)).unwrap().unwrap();
    assert_eq!(found.render(&[], false).unwrap(), "plain");
    assert!(ChatTemplate::of(&tokenizer_with(Value::Null)).unwrap().is_none());
    let mut files = tokenizer_with(json!("settings")).files().to_vec();
    files.push(("chat_template.jinja".to_string(), b"file {{ eos_token }}".to_vec()));
    let found = ChatTemplate::of(&Tokenizer::from_files(files, "dir").unwrap()).unwrap().unwrap();
    assert_eq!(found.render(&[], false).unwrap(), "file <|end|>");
}

#[test]
fn broken_templates_are_named() {
    let error = |template: Value| ChatTemplate::of(&tokenizer_with(template)).unwrap_err();
    let syntax = error(json!("{% if x %}\n{{ 1 + }}"));
    assert!(matches!(syntax, ChatError::Syntax { line: 2, .. }), "{syntax}");
    assert!(syntax.to_string().contains("/tokenizer_config.json: line 2 of the chat template"), "{syntax}");
    assert!(error(json!(3)).to_string().contains("`chat_template` is 3, expected a text"));
    assert!(error(json!([{"name": "rag", "template": ""}])).to_string().contains("named `default`"));
    let failing = template("a\n{{ messages[0].content.fly() }}").render(&conversation(), false);
    let text = failing.unwrap_err().to_string();
    assert!(text.contains("failed at line 2") && text.contains("fly"), "{text}");
}

#[test]
fn transformers_renders_the_same() {
    for (name, source) in [("chatml", CHATML), ("headers", HEADERS), ("reasoning", REASONING)] {
        let tokenizer = tokenizer_with(json!(source));
        let chat = ChatTemplate::of(&tokenizer).unwrap().unwrap();
        let variables = json!({"date_string": "1 May 2030"});
        let cases = json!([
            {"messages": conversation(), "prompt": true, "variables": variables},
            {"messages": conversation()[1..], "prompt": false, "variables": variables},
        ]);
        let dir = TempDir::new("chat");
        for (file, contents) in tokenizer.files() {
            fs::write(dir.file(file), contents).unwrap();
        }
        fs::write(dir.file("cases.json"), cases.to_string()).unwrap();
        let paths = [dir.path().to_path_buf(), dir.file("cases.json")];
        let [path, file] = paths.each_ref().map(|p| p.to_str().unwrap());
        let Some(output) = python("tokenizer.py", &["chat", path, file]) else {
            return;
        };
        let theirs: Value = serde_json::from_str(&output).unwrap();
        for (case, theirs) in cases.as_array().unwrap().iter().zip(theirs["texts"].as_array().unwrap()) {
            let prompt = case["prompt"].as_bool().unwrap();
            let ours = chat.render_json(&case["messages"], prompt, variables.as_object().unwrap()).unwrap();
            assert_eq!(Some(ours.as_str()), theirs.as_str(), "{name}");
        }
    }
}

/// Templates that would take all time, stack or memory are errors that name the file.
#[test]
fn what_a_template_uses_up_is_bounded() {
    let message = |source: &str| match ChatTemplate::new(source, "hostile.jinja") {
        Ok(template) => template.render(&[Message::new("user", "hi")], true).expect_err(source).to_string(),
        Err(error) => error.to_string(),
    };
    let deep = "{% set ns = namespace(x=[]) %}{% for i in range(50000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let range = "{% for i in range(100000) %}";
    let end = "{% endfor %}";
    for (source, expected) in [
        (format!("{range}{range}{range}{end}{end}{end}"), "fuel"),
        (format!("{{{{ 1{} }}}}", "+1".repeat(200_000)), "bytes, expected at most"),
        (format!("{{# {{{{ ' #}}{{{{ 1{} }}}}", "+1".repeat(120_000)), "bytes, expected at most"),
        (format!("{{{{ {{'a': {{}}}}, 1{} }}}}", "+1".repeat(120_000)), "bytes, expected at most"),
        (
            format!("{{% raw %}}{{{{ '{{% endraw %}}{{{{ 1{} }}}}", "+1".repeat(120_000)),
            "bytes, expected at most",
        ),
        (format!("{{{{ {}1{} }}}}", "(".repeat(8000), ")".repeat(8000)), "recursion"),
        (format!("{}{}", "{% if a %}".repeat(9000), "{% endif %}".repeat(9000)), "recursion"),
        (
            format!(
                "{deep}{{{{ ns.x == ns.x }}}}{{{{ ns.x | string | length }}}}{{{{ raise_exception('ok') }}}}"
            ),
            "ok",
        ),
        (format!("{deep}{{% set text = ns.x | tojson %}}{{{{ raise_exception('ok') }}}}"), "ok"),
        ("{{ messages | tojson(indent=10**12) }}".to_string(), "an indent of 1000000000000"),
        ("{{ 'a' | indent(10**12, true) }}".to_string(), "indent: 1000000000000 is above"),
        ("{{ 'a' | indent(width=10**12, first=true) }}".to_string(), "indent: 1000000000000 is above"),
        ("{{ '%9999999999d' | format(1) }}".to_string(), "a width of 9999999999 is above"),
        ("{{ '{:>9999999999}'.format(1) }}".to_string(), "a width of 9999999999 is above"),
        ("{{ '%*d' | format(10**10, 1) }}".to_string(), "format: 10000000000 is above"),
        ("{{ [1] | batch(10**12, 0) }}".to_string(), "batch: 1000000000000 is above"),
        ("{{ [1] | slice(10**12) }}".to_string(), "slice: 1000000000000 is above"),
        ("{{ ('a' * 99999) | replace('', 'b' * 99999) }}".to_string(), "could have more than"),
        ("{{ ('a' * 99999).replace('', 'b' * 99999) }}".to_string(), "could have more than"),
        ("{{ 'a' * 10**12 }}".to_string(), "too large"),
        (format!("{range}{{{{ 'a' * 99999 }}}}{end}"), "a text of more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_string(), "recursion"),
        ("a".repeat(300 << 10), "307200 bytes, expected at most 262144"),
    ] {
        let text = message(&source);
        let start = source.chars().take(60).collect::<String>();
        assert!(text.contains("hostile.jinja") && text.contains(expected), "{start}: {text}");
    }
    // As many branches as fit are compiled on the stack that is there.
    let branches = format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}x".repeat(20_000));
    let _ = ChatTemplate::new(&branches, "long.jinja").map(|template| template.render(&[], true));
    let sum = format!("{{{{ 1{} }}}}", "+1".repeat(8_000));
    assert_eq!(ChatTemplate::new(&sum, "sum").unwrap().render(&[], true).unwrap(), "8001");
}
