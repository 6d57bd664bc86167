// Saves and copies graphs.
#include <openvino/pass/serialize.hpp>

#include "model.hpp"

extern "C" int ovfleet_save(ov_model_t* model, const char* xml, const char* bin) {
    return ovfleet::guarded([&] { ov::pass::Serialize(xml, bin).run_on_model(model->object); });
}

extern "C" int ovfleet_clone(const ov_model_t* model, ov_model_t** copy) {
    return ovfleet::guarded([&] { *copy = new ov_model{model->object->clone()}; });
}
