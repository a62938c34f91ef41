//! A model that is served with adapters beside it, and new ones in their place.

use super::{Server, ids};
use crate::adapters::{FAMILY, adapter};
use crate::models::{TempDir, qurl, saved};
use serde_json::json;
use std::path::Path;

#[test]
fn adapters_are_served_and_replaced() {
    let (base, place) = (saved(FAMILY), TempDir::new());
    let [first, second] = ["first", "second"].map(|name| place.path().join(name));
    let lora = adapter(&first, 3).0;
    adapter(&second, 4);
    let text = |path: &Path| path.to_str().expect("UTF-8").to_string();
    let generated = |adapter: &Path| {
        let rest = ["--format", "int8", "--max-new", "12", "--seed", "4", "--json", "1+1="];
        let model = ["generate", "--model", base.text(), "--adapter", &text(adapter)];
        ids(&qurl(&[&model[..], &rest].concat()).json()["samples"][0]["ids"])
    };
    let server = Server::start(base.text(), &["--format", "int8", "--adapter", &text(&first)]);
    let ask = || {
        let body = json!({"prompt": "1+1=", "max_tokens": 12, "seed": 4, "return_token_ids": true});
        ids(&server.post("/v1/completions", body, 200)["choices"][0]["token_ids"])
    };
    assert_eq!(ask(), generated(&first));
    server.post("/update_weights", json!({"weight_dir": second, "version": "second"}), 200);
    assert_eq!(ask(), generated(&second));
    assert_ne!(generated(&first), generated(&second));

    // The base stays: a whole model is no new weights, and other adapters would need other memory.
    let refused = server.post("/update_weights", json!({"weight_dir": base.text()}), 400).to_string();
    assert!(refused.contains("a whole model (config.json)"), "{refused}");
    let settings = first.join("adapter_config.json");
    let changed = std::fs::read_to_string(&settings)
        .expect("settings")
        .replace("\"lora_alpha\": 8", "\"lora_alpha\": 9");
    std::fs::write(&settings, changed).expect("written");
    let refused = server.post("/update_weights", json!({"weight_dir": first}), 400).to_string();
    assert!(
        refused.contains("alpha 9") && refused.contains(&format!("expected those served, with {lora}")),
        "{refused}"
    );
    assert_eq!(ask(), generated(&second));
}
