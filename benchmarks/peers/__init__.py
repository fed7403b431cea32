"""One model in Penstock, OpenVINO GenAI and llama.cpp: what each number format costs and brings."""
